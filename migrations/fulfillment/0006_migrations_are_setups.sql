-- A service that may use the tables gets its rights to them by default privileges
-- (deploy/postgres/provision.sql), and those know no exception. This table is one: readiness reads
-- it, and only whoever migrates writes it.
do $$
declare
    reader text;
begin
    for reader in
        select distinct quote_ident(pg_get_userbyid(granted.grantee))
        from pg_class as t, aclexplode(t.relacl) as granted
        -- 0 is public, which has no rights here.
        where t.oid = '_sqlx_migrations'::regclass and granted.grantee not in (0, t.relowner)
    loop
        execute 'revoke insert, update, delete on _sqlx_migrations from ' || reader;
    end loop;
end
$$;
