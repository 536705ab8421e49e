{{/* Name of every object: the release, with "ballast" in it. */}}
{{- define "ballast.name" -}}
{{- if contains "ballast" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-ballast{{ end }}
{{- end }}

{{/* Labels that select the servers; they never change. */}}
{{- define "ballast.selector" -}}
app.kubernetes.io/name: ballast
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "ballast.labels" -}}
{{ include "ballast.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* What cannot be honoured together. ballastd would refuse most of it in every pod; here an upgrade ends before. */}}
{{- define "ballast.checkSecurity" -}}
{{- $tls := .Values.tls }}{{ $access := .Values.access }}{{ $etcd := .Values.discovery }}{{ $metrics := .Values.metrics -}}
{{- if and (not $tls.secret) (or $tls.clientCaSecret $tls.serverCaSecret $tls.http) }}{{ fail "tls.clientCaSecret, tls.serverCaSecret and tls.http need tls.secret, the servers' certificate and key" }}{{ end -}}
{{- if and (or $access.tokensSecret $access.importTokenSecret) (not $tls.secret) }}{{ fail "access.tokensSecret and access.importTokenSecret need tls.secret: from other pods a token would travel in the clear, and servers refuse it" }}{{ end -}}
{{- if and $access.rightsConfigMap (not (or $tls.clientCaSecret $access.tokensSecret)) }}{{ fail "access.rightsConfigMap needs tls.clientCaSecret or access.tokensSecret, by which callers have an identity" }}{{ end -}}
{{- if and (not $etcd.etcd) (or $etcd.prefix $etcd.caSecret $etcd.certificateSecret $etcd.user $etcd.passwordSecret) }}{{ fail "discovery.etcd is empty; expected host:port of etcd's members beside the rest of discovery" }}{{ end -}}
{{- if and (or $etcd.certificateSecret $etcd.user) (not $etcd.caSecret) }}{{ fail "discovery.certificateSecret and discovery.user need discovery.caSecret: without TLS others could read the password" }}{{ end -}}
{{- if ne (empty $etcd.user) (empty $etcd.passwordSecret) }}{{ fail "discovery.user and discovery.passwordSecret belong together" }}{{ end -}}
{{- if gt (int .Values.copies) 1 }}
{{- if not $etcd.etcd }}{{ fail (printf "copies is %d, and discovery.etcd is empty; expected the etcd that knows where copies are" (int .Values.copies)) }}{{ end -}}
{{- if gt (int .Values.copies) (int .Values.servers) }}{{ fail (printf "copies is %d, expected at most servers (%d): each copy is on a server of its own" (int .Values.copies) (int .Values.servers)) }}{{ end -}}
{{- if and $tls.secret (not $tls.serverCaSecret) (not $tls.clientCaSecret) }}{{ fail "copies with tls.secret need tls.serverCaSecret, by which servers check each other" }}{{ end -}}
{{- if and $access.tokensSecret (not $tls.clientCaSecret) (not $access.importTokenSecret) }}{{ fail "copies need access.importTokenSecret, since servers know callers by tokens alone" }}{{ end -}}
{{- end -}}
{{- if and $metrics.podMonitor $tls.http (not $metrics.tlsSecret) }}{{ fail "metrics.tlsSecret is empty; expected a Secret by which the PodMonitor knows the servers (ca.crt), since tls.http is true" }}{{ end -}}
{{- end }}

{{/* Folders of mounted Secrets and ConfigMaps below /etc/ballast: {folder: {kind, name}}. */}}
{{- define "ballast.files" -}}
{{- with .Values.tls.secret }}
tls: {secret: {secretName: {{ . | quote }}, defaultMode: 0440}}
{{- end }}
{{- with .Values.tls.clientCaSecret }}
client-ca: {secret: {secretName: {{ . | quote }}, defaultMode: 0440, items: [{key: ca.crt, path: ca.crt}]}}
{{- end }}
{{- with .Values.tls.serverCaSecret }}
server-ca: {secret: {secretName: {{ . | quote }}, defaultMode: 0440, items: [{key: ca.crt, path: ca.crt}]}}
{{- end }}
{{- with .Values.access.importTokenSecret }}
import-token: {secret: {secretName: {{ . | quote }}, defaultMode: 0440, items: [{key: token, path: token}]}}
{{- end }}
{{- with .Values.access.rightsConfigMap }}
rights: {configMap: {name: {{ . | quote }}}}
{{- end }}
{{- with .Values.access.tokensSecret }}
tokens: {secret: {secretName: {{ . | quote }}, defaultMode: 0440}}
{{- end }}
{{- with .Values.discovery.caSecret }}
etcd-ca: {secret: {secretName: {{ . | quote }}, defaultMode: 0440, items: [{key: ca.crt, path: ca.crt}]}}
{{- end }}
{{- with .Values.discovery.certificateSecret }}
etcd-tls: {secret: {secretName: {{ . | quote }}, defaultMode: 0440}}
{{- end }}
{{- with .Values.discovery.passwordSecret }}
etcd-password: {secret: {secretName: {{ . | quote }}, defaultMode: 0440, items: [{key: password, path: password}]}}
{{- end }}
{{- end }}

{{/* URL of the registry, without files and user: for trainers elsewhere, which have their own. */}}
{{- define "ballast.registry" -}}
etcd://{{ join "," .Values.discovery.etcd }}/{{ .Values.discovery.prefix | default (printf "%s/%s" .Release.Namespace (include "ballast.name" .)) }}
{{- end }}

{{/* Variables of ballastd for the files. */}}
{{- define "ballast.securityEnvironment" -}}
{{- $files := "/etc/ballast" }}
{{- if .Values.tls.secret }}
- {name: BALLAST_TLS_CERTIFICATE, value: {{ $files }}/tls/tls.crt}
- {name: BALLAST_TLS_KEY, value: {{ $files }}/tls/tls.key}
{{- end }}
{{- if .Values.tls.clientCaSecret }}
- {name: BALLAST_TLS_CLIENT_CA, value: {{ $files }}/client-ca/ca.crt}
{{- end }}
{{- if .Values.tls.serverCaSecret }}
- {name: BALLAST_TLS_SERVER_CA, value: {{ $files }}/server-ca/ca.crt}
{{- end }}
{{- if .Values.access.importTokenSecret }}
- {name: BALLAST_IMPORT_TOKEN, value: {{ $files }}/import-token/token}
{{- end }}
{{- if .Values.tls.http }}
- {name: BALLAST_METRICS_TLS, value: "true"}
{{- end }}
{{- if .Values.access.rightsConfigMap }}
- {name: BALLAST_RIGHTS, value: {{ $files }}/rights/rights.yaml}
{{- end }}
{{- if .Values.access.tokensSecret }}
- {name: BALLAST_TOKENS, value: {{ $files }}/tokens/tokens.yaml}
{{- end }}
{{- with .Values.discovery }}{{ if .etcd }}
{{- $query := list }}
{{- if .caSecret }}{{ $query = append $query (printf "ca=%s/etcd-ca/ca.crt" $files) }}{{ end }}
{{- if .certificateSecret }}{{ $query = append $query (printf "certificate=%s/etcd-tls/tls.crt&key=%s/etcd-tls/tls.key" $files $files) }}{{ end }}
{{- if .user }}{{ $query = append $query (printf "user=%s&password_file=%s/etcd-password/password" .user $files) }}{{ end }}
- {name: BALLAST_DISCOVERY, value: {{ printf "%s%s" (include "ballast.registry" $) (ternary (printf "?%s" (join "&" $query)) "" (gt (len $query) 0)) | quote }}}
- {name: BALLAST_ADVERTISE, value: {{ printf "$(BALLAST_SERVER_ID).%s.%s.svc:7070" (include "ballast.name" $) $.Release.Namespace | quote }}}
{{- end }}{{ end }}
{{- end }}

{{/* MiB in a text such as 64GiB. */}}
{{- define "ballast.mib" -}}
{{- $number := regexFind "^[0-9]+" . | int64 -}}
{{- if hasSuffix "KiB" . }}{{ div (add $number 1023) 1024 }}
{{- else if hasSuffix "MiB" . }}{{ $number }}
{{- else if hasSuffix "GiB" . }}{{ mul $number 1024 }}
{{- else }}{{ mul $number 1048576 }}{{ end -}}
{{- end }}

{{/* How trainers find the servers, in BALLAST_SERVERS: by all addresses, or with copies by the registry. */}}
{{- define "ballast.servers" -}}
{{- if gt (int .Values.copies) 1 }}{{ include "ballast.registry" . }}?servers={{ .Values.servers }}
{{- else }}{{ include "ballast.addresses" (list . 0 (int .Values.servers)) }}{{ end -}}
{{- end }}

{{/* Addresses of the servers from a number up to another one: list $ FROM END. */}}
{{- define "ballast.addresses" -}}
{{- $ := index . 0 }}{{ $from := index . 1 }}{{ $name := include "ballast.name" $ -}}
{{- range $i := untilStep $from (index . 2) 1 }}{{ if gt $i $from }},{{ end }}{{ $name }}-{{ $i }}.{{ $name }}.{{ $.Release.Namespace }}.svc:7070{{ end -}}
{{- end }}

{{- define "ballast.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
{{- end }}

{{- define "ballast.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}
