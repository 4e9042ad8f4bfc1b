"""Media in: from what a person gives to frames and samples the models take. `read` is the door."""
