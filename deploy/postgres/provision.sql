-- Databases and roles, once, by a superuser: `psql --file provision.sql`, with the four passwords in
-- the environment, or in files that NAME_FILE names. The compose file has the image run it on an empty
-- volume.
--
-- Each service has a database, and two roles for it:
--   *_setup  owns the database and, by migrating, the tables; used by the subcommand `setup` alone;
--   the other is what the service runs as: it reads and writes rows, and changes no table.
-- Neither can connect to the other service's database.

\set orders_setup_password `printf %s "${ORDERS_SETUP_PASSWORD-$(cat "$ORDERS_SETUP_PASSWORD_FILE")}"`
\set orders_password `printf %s "${ORDERS_PASSWORD-$(cat "$ORDERS_PASSWORD_FILE")}"`
\set fulfillment_setup_password `printf %s "${FULFILLMENT_SETUP_PASSWORD-$(cat "$FULFILLMENT_SETUP_PASSWORD_FILE")}"`
\set fulfillment_password `printf %s "${FULFILLMENT_PASSWORD-$(cat "$FULFILLMENT_PASSWORD_FILE")}"`

create role orders_setup      login password :'orders_setup_password';
create role orders            login password :'orders_password';
create role fulfillment_setup login password :'fulfillment_setup_password';
create role fulfillment       login password :'fulfillment_password';

create database orders      owner orders_setup;
create database fulfillment owner fulfillment_setup;

-- Everybody may connect to a new database, and make temporary tables in it. Not here.
revoke all on database orders, fulfillment from public;
grant connect on database orders      to orders;
grant connect on database fulfillment to fulfillment;

-- Rights to tables that do not exist yet: whatever a migration creates, the service may use.
\connect orders
alter default privileges for role orders_setup in schema public
    grant select, insert, update, delete on tables to orders;

\connect fulfillment
alter default privileges for role fulfillment_setup in schema public
    grant select, insert, update, delete on tables to fulfillment;
