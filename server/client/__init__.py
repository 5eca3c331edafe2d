"""For people who call a server; quill.client is its stable name."""
