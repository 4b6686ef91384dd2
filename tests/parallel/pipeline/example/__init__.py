"""The worked example of CONTRIBUTING.md: a schedule of one's own."""
