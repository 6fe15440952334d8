"""`conformance doctor`: does an engine do what it declares, and can the reference be loaded here."""
