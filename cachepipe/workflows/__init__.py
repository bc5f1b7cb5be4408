"""The verbs: each module opens with its numbered steps and puts domain and adapters in order."""
