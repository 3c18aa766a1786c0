"""An endpoint picker for gateways of the Gateway API: answers over Envoy's external processing protocol which endpoint
serves a request (`kvferry picker`). It routes by the gateway's policies, and serves the model servers of others too.
"""
