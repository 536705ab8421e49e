"""The ranks that train one job: how they find each other, exchange messages, and do one thing together."""
