"""The `pellucid` command; one file a sub-command."""
