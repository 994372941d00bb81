"""Where keys and values are kept: `store.py` has the contract, the other modules its implementations."""
