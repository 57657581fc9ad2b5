"""The device: training, profiles, context, private model, gate, and the MQTT agent around them."""
