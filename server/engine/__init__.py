"""The loop: plan, run, commit, events; its thread and the two sides of its mailbox."""
