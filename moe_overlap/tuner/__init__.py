"""Know what a plan costs before it runs, and find a good one. No torch outside `capture`'s recorders."""
