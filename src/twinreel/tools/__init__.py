"""Tools that tell what a run is worth: compare, validate, trace, the frozen requests, the figures behind them."""
