"""How tokens are decoded: levels that draft and check, and who chooses what drafts."""
