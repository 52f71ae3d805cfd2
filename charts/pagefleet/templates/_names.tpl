{{/* Names, labels and images. */}}

{{- define "pagefleet.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" (.Release.Name | trunc 30 | trimSuffix "-") .Chart.Name -}}
{{- end -}}
{{- end -}}

{{- define "pagefleet.operator" -}}
{{ include "pagefleet.fullname" . }}-operator
{{- end -}}

{{/* Roles without a namespace must not meet those of another release. */}}
{{- define "pagefleet.clusterName" -}}
{{ .Release.Namespace }}-{{ include "pagefleet.operator" . }}
{{- end -}}

{{- define "pagefleet.selector" -}}
app.kubernetes.io/name: pagefleet-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "pagefleet.labels" -}}
{{ include "pagefleet.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: pagefleet
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* The reference of one of the three images: list $ "operator". */}}
{{- define "pagefleet.image" -}}
{{- $root := index . 0 -}}
{{- $image := index $root.Values.images (index . 1) -}}
{{- $registry := $root.Values.images.registry | trimSuffix "/" -}}
{{- if $registry -}}{{ $registry }}/{{- end -}}
{{- $image.repository -}}
{{- if $image.digest -}}@{{ $image.digest }}{{- else -}}:{{ $image.tag | default $root.Chart.AppVersion }}{{- end -}}
{{- end -}}

{{- define "pagefleet.pullSecrets" -}}
{{- with .Values.images.pullSecrets -}}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end -}}
{{- end -}}

{{/* The namespaces to serve, as a JSON list; empty with watch.all. */}}
{{- define "pagefleet.namespaces" -}}
{{- if .Values.watch.all -}}
[]
{{- else -}}
{{ .Values.watch.namespaces | default (list .Release.Namespace) | uniq | toJson }}
{{- end -}}
{{- end -}}
