"""Where a model may come from: one table of kinds, the catalogue, packages, a hub. No torch."""
