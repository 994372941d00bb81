"""What proposes tokens: `protocol.py` says what a drafter is, the other modules are drafters."""
