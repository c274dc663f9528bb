{{- define "headrace.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}{{- end -}}
{{- end -}}

{{- define "headrace.labels" -}}
app.kubernetes.io/name: headrace
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "headrace.selector" -}}
app.kubernetes.io/name: headrace
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* The served model's name, as the worker itself derives it. */}}
{{- define "headrace.served" -}}
{{- .servedModelName | default (.model | base | trimSuffix ".gguf" | lower) -}}
{{- end -}}

{{/* The queue that a worker group is scaled on: its first. */}}
{{- define "headrace.queue" -}}
{{- if .queues }}{{ first .queues }}{{ else }}{{ include "headrace.served" . }}{{ end -}}
{{- end -}}

{{/* HEADRACE_REDIS_URL from a secret; with the bundled Redis the password alone is secret. */}}
{{- define "headrace.redisEnv" -}}
{{- if .Values.redis.existingSecret }}
- name: HEADRACE_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ .Values.redis.existingSecret }}
      key: {{ .Values.redis.existingSecretKey }}
{{- else }}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ .Values.redis.passwordSecret | default (printf "%s-redis" (include "headrace.fullname" .)) }}
      key: {{ .Values.redis.passwordSecretKey }}
- name: HEADRACE_REDIS_URL
  value: redis://:$(REDIS_PASSWORD)@{{ include "headrace.fullname" . }}-redis:6379/0
{{- end }}
{{- end -}}

{{- define "headrace.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* preStop + drain + room to flush, unregister and exit: the one place where it is said. */}}
{{- define "headrace.grace" -}}
{{- add .preStop .drain 15 -}}
{{- end -}}

{{/* Target per replica of one capacity type: with a share of the queue the target grows. */}}
{{- define "headrace.target" -}}
{{- $target := .root.Values.autoscaling.target -}}
{{- if eq .root.Values.autoscaling.metric "replicas" }}{{ $target = 1 }}{{ end -}}
{{- divf (float64 $target) (float64 .capacity.share) | printf "%.3f" -}}
{{- end -}}

{{- define "headrace.query" -}}
{{- $queue := include "headrace.queue" .worker -}}
{{- if eq .root.Values.autoscaling.metric "tokens" -}}
sum(max by (queue, kind) (headrace_queue_outstanding_tokens{queue="{{ $queue }}"}))
{{- else if eq .root.Values.autoscaling.metric "replicas" -}}
max by (queue) (headrace_queue_replicas_required{queue="{{ $queue }}"})
{{- else -}}
max by (queue) (headrace_queue_outstanding_jobs{queue="{{ $queue }}"})
{{- end -}}
{{- end -}}

{{/* The worker groups' capacity types, and what is refused before anything is written. */}}
{{- define "headrace.check" -}}
{{- range .Values.workers }}
{{- $share := 0.0 }}
{{- if .onDemand.enabled }}{{ $share = addf $share .onDemand.share }}{{ end }}
{{- if .spot.enabled }}{{ $share = addf $share .spot.share }}{{ end }}
{{- if and (or .onDemand.enabled .spot.enabled) (or (lt $share 0.999) (gt $share 1.001)) }}
{{- fail (printf "workers %s: the shares of its enabled capacity types add up to %v; they must add up to 1" .name $share) }}
{{- end }}
{{- if and (eq $.Values.autoscaling.kind "hpa") (not $.Values.autoscaling.hpa.scaleToZeroDeclared) (semverCompare "<1.37-0" $.Capabilities.KubeVersion.Version) }}
{{- if or (and .onDemand.enabled (eq (int .onDemand.minReplicas) 0)) (and .spot.enabled (eq (int .spot.minReplicas) 0)) }}
{{- fail (printf "workers %s: minReplicas 0 with a plain HPA needs the HPAScaleToZero feature; set autoscaling.hpa.scaleToZeroDeclared if your cluster has it, or use keda" .name) }}
{{- end }}
{{- end }}
{{- if and (eq $.Values.autoscaling.kind "keda") (lt (int $.Values.autoscaling.keda.cooldownPeriod) (mul 2 (int .coldStartSeconds))) }}
{{- fail (printf "autoscaling.keda.cooldownPeriod %v is less than twice the cold start of workers %s (%v s)" $.Values.autoscaling.keda.cooldownPeriod .name .coldStartSeconds) }}
{{- end }}
{{- end }}
{{- end -}}
