"""The contents of a state_dict: the job that it names, the parameter that an entry belongs to, and the entries themselves."""
