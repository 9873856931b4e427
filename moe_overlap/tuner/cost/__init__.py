"""What a plan costs: seconds and bytes of its stages, from captured graphs, links and efficiencies. No torch."""
