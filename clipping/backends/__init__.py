"""The clipping backends, behind one interface."""
