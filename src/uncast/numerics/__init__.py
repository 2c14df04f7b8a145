"""The only place that knows bits: e4m3 and ue8m0 encode, decode and tables."""
