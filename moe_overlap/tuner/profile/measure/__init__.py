"""Measuring with torch: besides the capture, the one part of the tuner that runs operators."""
