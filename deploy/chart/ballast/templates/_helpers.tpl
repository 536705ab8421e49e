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

{{/* MiB in a text such as 64GiB. */}}
{{- define "ballast.mib" -}}
{{- $number := regexFind "^[0-9]+" . | int64 -}}
{{- if hasSuffix "KiB" . }}{{ div (add $number 1023) 1024 }}
{{- else if hasSuffix "MiB" . }}{{ $number }}
{{- else if hasSuffix "GiB" . }}{{ mul $number 1024 }}
{{- else }}{{ mul $number 1048576 }}{{ end -}}
{{- end }}

{{/* Addresses of all servers, as trainers take them in BALLAST_SERVERS. */}}
{{- define "ballast.servers" -}}
{{- $name := include "ballast.name" . -}}
{{- range $i := until (int .Values.servers) }}{{ if $i }},{{ end }}{{ $name }}-{{ $i }}.{{ $name }}.{{ $.Release.Namespace }}.svc:7070{{ end -}}
{{- end }}
