"""The error that a user sees for a mistake: a line that names subject, value, rule and fix."""

from __future__ import annotations


class ConfigError(Exception):
    """A user's mistake in a flag, a plan field or a file.

    Args:
        subject: the flag, field or file, as the user wrote it (`--num-experts`, `plan.json stages[1].data`).
        value: its value; the empty string when the subject alone is the mistake.
        rule: what must hold and does not.
        fix: what to do next.
    """

    def __init__(self, subject: str, value: object, rule: str, fix: str) -> None:
        self.subject, self.value, self.rule, self.fix = subject, value, rule, fix
        head = f"{subject} {value}" if value != "" else subject
        super().__init__(" ".join(f"{head}: {rule}; {fix}".split()))
