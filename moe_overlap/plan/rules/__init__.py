"""The rules of a valid plan. Each error names stage, field, value, rule and fix."""
