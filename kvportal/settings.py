"""Django's settings. Everything that varies between installations comes from `kvportal.config.site`."""

from __future__ import annotations

import os

from kvportal.config.site import CHECKOUT, load_site

SITE = load_site(os.environ)

SECRET_KEY = SITE.secret_key
DEBUG = SITE.debug
ALLOWED_HOSTS = list(SITE.allowed_hosts)
CSRF_TRUSTED_ORIGINS = list(SITE.csrf_trusted_origins)

INSTALLED_APPS = [
    "daphne",  # first: it installs the asyncio reactor before anything else imports Twisted
    "kvportal",
    "streams",
    "routing",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "channels",
    "rest_framework",
    "drf_spectacular",
]

MIDDLEWARE = [
    "kvportal.middleware.MachinePathsMiddleware",  # first: what machines ask for is not for the others
    "django.middleware.security.SecurityMiddleware",
    "kvportal.staticfiles.StaticFilesMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

ROOT_URLCONF = "kvportal.urls"
ASGI_APPLICATION = "kvportal.asgi.application"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [CHECKOUT / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

DATABASES = {"default": SITE.database}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

CHANNEL_LAYERS = {"default": SITE.channel_layer}

AUTH_PASSWORD_VALIDATORS = [
    {"NAME": f"django.contrib.auth.password_validation.{name}"}
    for name in (
        "UserAttributeSimilarityValidator",
        "MinimumLengthValidator",
        "CommonPasswordValidator",
        "NumericPasswordValidator",
    )
]
LOGIN_URL = "admin:login"

LANGUAGE_CODE = "en-us"
TIME_ZONE = "UTC"
USE_I18N = False
USE_TZ = True
FORMAT_MODULE_PATH = "kvportal.formats"

STATIC_URL = "/static/"
# Without a collected directory the files are served from where the apps keep them: a checkout
# works without a build step.
STATIC_ROOT = SITE.static_root
WHITENOISE_USE_FINDERS = SITE.static_root is None

# TLS ends at a proxy: with KVPORTAL_HTTPS cookies travel over TLS alone and browsers are sent there.
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = SECURE_SSL_REDIRECT = SITE.https
SECURE_HSTS_SECONDS = SITE.hsts_seconds if SITE.https else 0
SECURE_HSTS_INCLUDE_SUBDOMAINS = SITE.https
if SITE.proxy_tls_header:
    SECURE_PROXY_SSL_HEADER = ("HTTP_" + SITE.proxy_tls_header.upper().replace("-", "_"), "https")
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = CSRF_COOKIE_SAMESITE = "Lax"
X_FRAME_OPTIONS = "DENY"
# The list that browsers ship is for public sites; a portal is an internal one.
SILENCED_SYSTEM_CHECKS = ["security.W021"]

REST_FRAMEWORK = {
    # The internal API takes a token header and no cookie: without session authentication there is
    # nothing for another site to ride on.
    "DEFAULT_AUTHENTICATION_CLASSES": [],
    "DEFAULT_PERMISSION_CLASSES": ["rest_framework.permissions.AllowAny"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["rest_framework.parsers.JSONParser"],
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
    "UNAUTHENTICATED_USER": None,
}

SPECTACULAR_SETTINGS = {
    "TITLE": "kvportal",
    "DESCRIPTION": "What LLM engines hold in their KV caches, and which of them should take a request.",
    "VERSION": "1",
    "OAS_VERSION": "3.1.0",  # 3.0 cannot say that an object may be null
    "SERVE_INCLUDE_SCHEMA": False,
}

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "filters": {
        "no_traceback_of_refusals": {"()": "kvportal.logs.NoTracebackOfRefusals"},
    },
    "formatters": {
        "line": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"},
    },
    "handlers": {
        "stderr": {
            "class": "logging.StreamHandler",
            "formatter": "line",
            "filters": ["no_traceback_of_refusals"],
        },
    },
    "root": {"handlers": ["stderr"], "level": SITE.log_level},
    "loggers": {
        # One access line per request would cost more than the request.
        "daphne": {"level": "WARNING"},
        "django": {"handlers": [], "level": SITE.log_level, "propagate": True},
        "django.server": {"handlers": [], "propagate": True},
        "twisted": {"level": "WARNING"},
    },
}
