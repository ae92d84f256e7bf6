"""Couplings to libraries: every patch, private access and version switch, one module for each library."""
