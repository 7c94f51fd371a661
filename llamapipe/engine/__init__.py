"""Many callers, one context: requests, their scheduling, the decoder thread, and what callers hold in their hands."""
