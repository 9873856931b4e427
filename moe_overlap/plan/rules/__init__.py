"""The rules that a valid plan satisfies. Each raises an error that names stage, field, value and fix."""
