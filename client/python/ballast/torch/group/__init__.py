"""The ranks that train one job: how they exchange messages, which rank has which parameters, and what must be the same on all."""
