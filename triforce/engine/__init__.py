"""From a call to its answer: the engine, which memory serves a call, documents that are kept."""
