"""Measuring with torch: the one part of the tuner, beside the capture, that runs operators."""
