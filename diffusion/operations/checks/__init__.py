"""Whether data, machines and ranks are fit for a run, and how busy they are while it goes on."""
