"""Training of the bundled model: `python -m twinreel.demo.train PART`, vae to evaluate (docs/demo-model.md)."""
