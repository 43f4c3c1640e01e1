{{- define "quota-share.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{/* At most 52 characters: the pods of a StatefulSet carry its name in a label with a hash of 10. */}}
{{- define "quota-share.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" -}}
{{- else if contains (include "quota-share.name" .) .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "quota-share.name" .) | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "quota-share.selector" -}}
app.kubernetes.io/name: {{ include "quota-share.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Without managed-by: Helm adds that itself to what it installs, and of a rendered manifest it would be wrong. */}}
{{- define "quota-share.labels" -}}
{{ include "quota-share.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end -}}

{{- define "quota-share.image" -}}
{{- .Values.image.repository }}:{{ .Values.image.tag }}{{ with .Values.image.digest }}@{{ . }}{{ end -}}
{{- end -}}

{{/* Where the Redis URL and the callers are: in a Secret that is there already, or in the chart's own. */}}
{{- define "quota-share.redisSecret" -}}
{{- .Values.store.redis.existingSecret | default (printf "%s-redis" (include "quota-share.fullname" .)) -}}
{{- end -}}
{{- define "quota-share.callersSecret" -}}
{{- .Values.auth.existingSecret | default (printf "%s-callers" (include "quota-share.fullname" .)) -}}
{{- end -}}

{{/* Not empty if there is a file of callers. */}}
{{- define "quota-share.hasCallers" -}}
{{- if or .Values.auth.existingSecret .Values.auth.callers }}true{{ end -}}
{{- end -}}
