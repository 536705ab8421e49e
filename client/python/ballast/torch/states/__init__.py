"""State that leaves a job and comes back: state_dicts, versions, optimizer.state, and what a state_dict has in it."""
