"""What a plan costs: seconds and bytes, without torch."""
