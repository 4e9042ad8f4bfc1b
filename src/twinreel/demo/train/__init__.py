"""Training of the bundled model: `python -m twinreel.demo.train video|audio|dit|export|evaluate` (docs/demo-model.md)."""
