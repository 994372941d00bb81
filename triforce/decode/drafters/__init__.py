"""What proposes tokens: `base.py` says what a drafter is, the other modules are drafters."""
