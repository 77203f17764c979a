"""The planted files are read and run by tests, and are none themselves."""

collect_ignore = ["planted"]
