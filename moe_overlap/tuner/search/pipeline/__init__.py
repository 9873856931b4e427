"""Stages together: how layers and devices are divided among them, and where they stand in the cluster."""
