"""Vision towers: pictures in, one row of features per patch out."""
