"""Commands about machines: `ludic doctor` says what works, `ludic plan` what fits."""
