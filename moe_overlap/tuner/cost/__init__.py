"""The cost of a plan: seconds and bytes of its stages, from captured graphs, links and efficiencies. No torch."""
