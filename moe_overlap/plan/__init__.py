"""What was decided: plans, and the instruction lists they are lowered to. Standard library only."""
