"""Keeps what autograd saves for backward outside the device's memory."""
