"""Interception: programs whose model endpoint cannot be set are answered by the gateway all the same.

    hosts.py         the model hosts: their paths, dialects, and what happens to their other paths
    certificates.py  the certificate authority of this machine, and what programs need in order to trust it
    variables.py     the environment of an intercepted program
    proxy.py         installs and runs mitmproxy
    addon.py         runs inside mitmproxy, and sends the requests for model hosts to the gateway

`polar intercept` starts a program with a proxy. In a sandbox there is none: the model hosts' names resolve to a socket
of the gateway (`gateway/intercepted.py`).
"""
