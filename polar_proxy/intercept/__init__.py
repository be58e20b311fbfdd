"""Interception: the gateway also answers the model calls of programs whose endpoint cannot be set.

    hosts.py         the model hosts: the paths of their model calls, and what happens to their other paths
    certificates.py  the certificate authority of this machine, and what programs need in order to trust it
    variables.py     the environment of an intercepted program
    proxy.py         installs and runs mitmproxy
    addon.py         runs inside mitmproxy, and sends the requests for model hosts to the gateway

`polar intercept` starts a program with a proxy. In a sandbox no proxy is needed, because the names of model hosts
resolve to a socket of the gateway (`gateway/hosted/intercepted.py`).
"""
