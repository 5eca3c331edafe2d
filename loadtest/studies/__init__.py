"""One-off studies, as scripts: `python -m quill.loadtest.studies.<name> --help`."""
