{{/* Combinations that the schema cannot refuse in words that help. */}}

{{- define "pagefleet.check" -}}
{{- if and .Values.watch.all .Values.watch.namespaces -}}
{{- fail "watch.all and watch.namespaces exclude each other: leave watch.namespaces empty for all namespaces, or set watch.all to false" -}}
{{- end -}}
{{- $known := .Capabilities.APIVersions.Has "pagefleet.dev/v1alpha1/InferenceProfile" -}}
{{- if and .Values.profiles .Release.IsInstall (not $known) -}}
{{- fail "profiles: this cluster does not know the kind InferenceProfile yet, and Helm cannot make a kind and its objects in one step: install without profiles, then `helm upgrade` with them (or apply crds/ first and set crds.install to false)" -}}
{{- end -}}
{{- end -}}
