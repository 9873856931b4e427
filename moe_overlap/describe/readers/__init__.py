"""Descriptions that users already have: Hugging Face configurations, shell scripts, upstream's flags."""
