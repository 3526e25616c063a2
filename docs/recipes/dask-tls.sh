#!/bin/bash
# Makes a key for a Dask cluster, once; nobody else may read it. Then run `. ~/dask-tls/environment` before the
# scheduler, each worker and the command, and `dask scheduler --protocol tls`: it takes only those who have the key.
set -e
umask 077
mkdir -p ~/dask-tls
cd ~/dask-tls
openssl req -x509 -newkey rsa:3072 -nodes -days 365 -subj /CN=dask -keyout key.pem -out cert.pem
for who in SCHEDULER WORKER CLIENT; do
    echo "export DASK_DISTRIBUTED__COMM__TLS__${who}__CERT=$PWD/cert.pem"
    echo "export DASK_DISTRIBUTED__COMM__TLS__${who}__KEY=$PWD/key.pem"
done > environment
echo "export DASK_DISTRIBUTED__COMM__TLS__CA_FILE=$PWD/cert.pem" >> environment
echo "export DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION=True" >> environment
