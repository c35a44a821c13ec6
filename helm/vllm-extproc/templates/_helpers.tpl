{{/* Name of the release's objects: short enough for the longest suffix. */}}
{{- define "router.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* What a selector may hold: these never change. */}}
{{- define "router.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: router
{{- end -}}

{{- define "router.sharedLabels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "router.labels" -}}
{{ include "router.selectorLabels" . }}
{{ include "router.sharedLabels" . }}
{{- end -}}

{{- define "router.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "router.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{/* An image by its digest, else by its tag. */}}
{{- define "router.imageOf" -}}
{{- if .digest -}}
{{- printf "%s@%s" .repository .digest -}}
{{- else -}}
{{- printf "%s:%s" .repository .tag -}}
{{- end -}}
{{- end -}}

{{- define "router.image" -}}
{{- $image := .Values.image -}}
{{- include "router.imageOf" (dict "repository" $image.repository "digest" $image.digest "tag" ($image.tag | default .Chart.AppVersion)) -}}
{{- end -}}

{{- define "router.envoyImage" -}}
{{- if .Values.envoy.fromWheel -}}
{{- include "router.image" . -}}
{{- else -}}
{{- include "router.imageOf" .Values.envoy.image -}}
{{- end -}}
{{- end -}}

{{/* Where the sockets and Envoy's event log are: the directory that envoy/bootstrap.yaml names. */}}
{{- define "router.directory" -}}/var/run/vllm-extproc{{- end -}}

{{/* Bytes of a quantity such as 2Gi. */}}
{{- define "router.bytes" -}}
{{- $text := toString . -}}
{{- $units := dict "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 -}}
{{- $unit := regexFind "[A-Za-z]+$" $text -}}
{{- $number := trimSuffix $unit $text -}}
{{- if not (regexMatch "^[0-9]+([.][0-9]+)?$" $number) -}}
{{- fail (printf "envoy.resources.limits.memory: %q is no number of bytes that the chart can read; set envoy.maxHeapBytes" $text) -}}
{{- end -}}
{{- $factor := 1 -}}
{{- if $unit -}}
{{- if not (hasKey $units $unit) -}}
{{- fail (printf "envoy.resources.limits.memory: the unit of %q is not known; set envoy.maxHeapBytes" $text) -}}
{{- end -}}
{{- $factor = get $units $unit -}}
{{- end -}}
{{- mulf (float64 $number) (float64 $factor) | int64 -}}
{{- end -}}

{{- define "router.maxHeapBytes" -}}
{{- $limit := dig "limits" "memory" "" (.Values.envoy.resources | default dict) -}}
{{- if .Values.envoy.maxHeapBytes -}}
{{- .Values.envoy.maxHeapBytes | int64 -}}
{{- else if $limit -}}
{{- $bytes := include "router.bytes" $limit | int64 -}}
{{- sub $bytes (div $bytes 4) -}}
{{- else -}}
{{- fail "envoy: set resources.limits.memory or maxHeapBytes, so that Envoy refuses requests before it runs out of memory" -}}
{{- end -}}
{{- end -}}

{{/* envoy/bootstrap.yaml as it is, but for the two figures that depend on the container. */}}
{{- define "router.bootstrap" -}}
{{- $heap := printf "max_heap_size_bytes: %s" (include "router.maxHeapBytes" .) -}}
{{- $connections := printf "max_active_downstream_connections: %d" (int64 .Values.envoy.maxConnections) -}}
{{- .Files.Get "files/bootstrap.yaml" | replace "max_heap_size_bytes: 2147483648" $heap | replace "max_active_downstream_connections: 32000" $connections -}}
{{- end -}}

{{/* Secrets that are mounted as files: directory, Secret and its key, by the option that names the file. */}}
{{- define "router.secretFiles" -}}
{{- $auth := .Values.auth -}}
{{- $all := list
  (dict "option" "api_keys_file" "dir" "api-keys" "secret" $auth.apiKeysFile.existingSecret "key" $auth.apiKeysFile.key)
  (dict "option" "htpasswd_file" "dir" "htpasswd" "secret" $auth.htpasswdFile.existingSecret "key" $auth.htpasswdFile.key)
  (dict "option" "jwt_jwks" "dir" "jwks" "secret" $auth.jwks.existingSecret "key" $auth.jwks.key)
  (dict "option" "worker_ca_file" "dir" "worker-ca" "secret" .Values.workerCa.existingSecret "key" .Values.workerCa.key)
  (dict "option" "tls_cert" "dir" "tls" "secret" .Values.tls.existingSecret "key" "tls.crt")
  (dict "option" "tls_key" "dir" "tls" "secret" .Values.tls.existingSecret "key" "tls.key")
  (dict "option" "tls_client_ca" "dir" "tls-client-ca" "secret" .Values.tls.clientCa.existingSecret "key" .Values.tls.clientCa.key)
-}}
{{- $used := list -}}
{{- range $all -}}
{{- if .secret -}}
{{- $used = append $used . -}}
{{- end -}}
{{- end -}}
{{- dict "files" $used | toJson -}}
{{- end -}}

{{/* The service's configuration file: the user's options, and what the chart decides. */}}
{{- define "router.config" -}}
{{- $dir := include "router.directory" . -}}
{{- $own := dict
  "prometheus_host" .Values.listenAddress
  "prometheus_port" .Values.ports.metrics
  "admin_address" (printf "unix:%s/admin.sock" $dir)
  "prefill_leg_address" (printf "unix:%s/prefill.sock" $dir)
  "shutdown_delay_s" .Values.shutdown.delaySeconds
  "shutdown_grace_s" .Values.shutdown.graceSeconds
-}}
{{- if eq .Values.mode "router" -}}
{{- $own = merge $own (dict
  "host" .Values.listenAddress
  "port" .Values.ports.http
  "grpc_address" (printf "unix:%s/extproc.sock" $dir)
  "envoy_admin_address" (printf "unix:%s/envoy-admin.sock" $dir)
  "envoy_events_dir" $dir
) -}}
{{- else -}}
{{- $host := .Values.listenAddress -}}
{{- if contains ":" $host -}}
{{- $host = printf "[%s]" $host -}}
{{- end -}}
{{- $own = merge $own (dict "grpc_address" (printf "%s:%d" $host (int .Values.ports.grpc)) "ext_proc_only" true) -}}
{{- end -}}
{{- range (include "router.secretFiles" . | fromJson).files -}}
{{- $_ := set $own .option (printf "/etc/vllm-extproc/%s/%s" .dir .key) -}}
{{- end -}}
{{- if .Values.discovery.enabled -}}
{{- $discovery := dict
  "service_discovery" true
  "service_discovery_port" .Values.discovery.port
-}}
{{- if .Values.config.vllm_pd_disaggregation -}}
{{- $discovery = merge $discovery (dict
  "prefill_selector" .Values.discovery.prefillSelector
  "decode_selector" .Values.discovery.decodeSelector
  "bootstrap_port_annotation" .Values.discovery.bootstrapPortAnnotation
) -}}
{{- else -}}
{{- $discovery = merge $discovery (dict "selector" .Values.discovery.selector) -}}
{{- end -}}
{{- with .Values.discovery.namespace -}}
{{- $_ := set $discovery "service_discovery_namespace" . -}}
{{- end -}}
{{- $own = merge $own $discovery -}}
{{- end -}}
{{- merge $own (deepCopy .Values.config) | toYaml -}}
{{- end -}}

{{/* Digest of what takes effect only with a restart; the service reads the rest again by itself. */}}
{{- define "router.restartDigest" -}}
{{- $config := include "router.config" . | fromYaml -}}
{{- range .Files.Lines "files/live-options.txt" -}}
{{- $config = omit $config . -}}
{{- end -}}
{{- printf "%s%s" (toJson $config) (include "router.bootstrap" . | fromYaml | toJson) | sha256sum -}}
{{- end -}}

{{/* What both containers, and those of the workers that run our image, may do: nothing. */}}
{{- define "router.securityContext" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
privileged: false
readOnlyRootFilesystem: true
runAsNonRoot: true
runAsUser: {{ .Values.runAsUser }}
runAsGroup: {{ .Values.runAsUser }}
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "router.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: {{ .Values.runAsUser }}
runAsGroup: {{ .Values.runAsUser }}
fsGroup: {{ .Values.runAsUser }}
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* KEY=VALUE, KEY=VALUE as labels. */}}
{{- define "router.labelsOf" -}}
{{- $labels := dict -}}
{{- range . -}}
{{- $parts := splitn "=" 2 . -}}
{{- $_ := set $labels $parts._0 $parts._1 -}}
{{- end -}}
{{- toYaml $labels -}}
{{- end -}}

{{/* Labels by which the discovery finds the workers of a role. */}}
{{- define "router.workerLabels" -}}
{{- $discovery := .root.Values.discovery -}}
{{- $selectors := dict "regular" $discovery.selector "prefill" $discovery.prefillSelector "decode" $discovery.decodeSelector -}}
{{- include "router.labelsOf" (get $selectors .role) -}}
{{- end -}}

{{/* What cannot work, told before anything is installed. */}}
{{- define "router.check" -}}
{{- $values := .Values -}}
{{- $pd := $values.config.vllm_pd_disaggregation -}}
{{- if and $values.discovery.enabled $pd (not (and $values.discovery.prefillSelector $values.discovery.decodeSelector)) -}}
{{- fail "discovery: prefillSelector and decodeSelector must be given with config.vllm_pd_disaggregation" -}}
{{- end -}}
{{- if and $values.discovery.enabled (not $pd) (not $values.discovery.selector) -}}
{{- fail "discovery.selector: at least one label is needed, or every Pod would be a worker" -}}
{{- end -}}
{{- if and $values.discovery.allNamespaces $values.discovery.namespace -}}
{{- fail "discovery: give namespace or allNamespaces, not both" -}}
{{- end -}}
{{- $keys := or $values.auth.apiKey.existingSecret $values.auth.apiKeysFile.existingSecret -}}
{{- $tokens := or $values.auth.jwks.existingSecret $values.config.jwt_issuer -}}
{{- $ways := compact (list $keys $values.auth.htpasswdFile.existingSecret $tokens (join "" $values.config.api_key_validation_urls)) -}}
{{- if gt (len $ways) 1 -}}
{{- fail "auth: clients can show keys, passwords, signed tokens or tokens that a service validates; choose one of them" -}}
{{- end -}}
{{- if and $values.auth.jwks.existingSecret (not $values.config.jwt_issuer) -}}
{{- fail "auth.jwks: config.jwt_issuer must be given too" -}}
{{- end -}}
{{- if and $values.httpRoute.enabled (not $values.httpRoute.parentRefs) -}}
{{- fail "httpRoute.parentRefs: name the Gateway" -}}
{{- end -}}
{{- if and $values.tls.clientCa.existingSecret (not $values.tls.existingSecret) -}}
{{- fail "tls.clientCa: tls.existingSecret must be given too" -}}
{{- end -}}
{{- if eq $values.mode "sidecar-only" -}}
{{- if or $values.auth.apiKey.existingSecret $values.auth.apiKeysFile.existingSecret $values.auth.htpasswdFile.existingSecret $values.auth.jwks.existingSecret $values.tls.existingSecret -}}
{{- fail "mode sidecar-only: who may come in, and TLS for clients, are the gateway's matter: empty auth and tls, and set the gateway up to ask" -}}
{{- end -}}
{{- if $values.adminApiKey.existingSecret -}}
{{- fail "mode sidecar-only: the admin API is reached through the router's own Envoy, which is not there; empty adminApiKey" -}}
{{- end -}}
{{- if $pd -}}
{{- fail "mode sidecar-only: config.vllm_pd_disaggregation needs the router's own Envoy, through which prompts reach prefill workers; take mode router" -}}
{{- end -}}
{{- $nobody := list -}}
{{- range .Files.Lines "files/gateway-options.txt" -}}
{{- if and . (hasKey $values.config .) (not (kindIs "invalid" (get $values.config .))) -}}
{{- $nobody = append $nobody (printf "config.%s" .) -}}
{{- end -}}
{{- end -}}
{{- if $nobody -}}
{{- fail (printf "mode sidecar-only: only the router's own Envoy carries out %s, and it is not there: take it out, and set the gateway up for it" (join ", " $nobody)) -}}
{{- end -}}
{{- if or $values.ingress.enabled $values.httpRoute.enabled -}}
{{- fail "mode sidecar-only: clients go to the gateway; turn ingress and httpRoute off" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Resources with every quantity as a string: servers of 1.20 take no number in a server-side apply, as Helm 4 does it. */}}
{{- define "router.resources" -}}
{{- $found := deepCopy (. | default dict) -}}
{{- range $kind := list "requests" "limits" -}}
{{- if hasKey $found $kind -}}
{{- range $name, $quantity := get $found $kind -}}
{{- $_ := set (get $found $kind) $name (toString $quantity) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $found -}}
{{- end -}}
