"""What an agent says and hears as its device.

`voice` queues the agent's messages, and is silent while another process speaks as the device; `ears` opens messages.
"""
